"""The world that the tasks act upon: customers, invoices, an outbox, exported pages.

One SQLite file, EXAMPLE_DATABASE. Nothing in it forbids a second mail to the same customer or the
same page twice: whatever is done twice can be counted. `activity` is the log of what was done.
Points in time are seconds since 1970.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timezone

from example_project.days import days

DATABASE = os.environ.get("EXAMPLE_DATABASE", "example-shop.db")
TRIAL_DAYS = 7
PAGE_SIZE = 2

SCHEMA = """
CREATE TABLE IF NOT EXISTS customers (
    id INTEGER PRIMARY KEY, name TEXT, email TEXT, trial_ends_at REAL, paid_at REAL);
CREATE TABLE IF NOT EXISTS invoices (
    id INTEGER PRIMARY KEY, customer_id INTEGER, cents INTEGER, due_at REAL, paid_at REAL);
CREATE TABLE IF NOT EXISTS outbox (
    id INTEGER PRIMARY KEY, sent_at REAL, recipient TEXT, subject TEXT);
CREATE TABLE IF NOT EXISTS exports (id TEXT PRIMARY KEY, token INTEGER);
CREATE TABLE IF NOT EXISTS pages (export_id TEXT, page INTEGER, content TEXT);
CREATE TABLE IF NOT EXISTS activity (
    id INTEGER PRIMARY KEY, done_at REAL, subject TEXT, action TEXT);
CREATE TABLE IF NOT EXISTS runs (
    id INTEGER PRIMARY KEY, task_id TEXT, task_name TEXT, pid INTEGER,
    started_at REAL, ended_at REAL, state TEXT);
"""


class StaleWriter(Exception):
    """A page came from a worker that does not own the export any more."""


@contextmanager
def database() -> Iterator[sqlite3.Connection]:
    """One transaction: committed at the end of the block, rolled back if it raises."""
    connection = sqlite3.connect(DATABASE, timeout=30, isolation_level="IMMEDIATE")
    with closing(connection) as db, db:
        db.row_factory = sqlite3.Row
        db.executescript(SCHEMA)
        yield db


# What customers do.


def sign_up(name: str, email: str) -> int:
    """Start a trial; returns the customer's id."""
    trial_ends_at = time.time() + days(TRIAL_DAYS).total_seconds()
    with database() as db:
        row = db.execute(
            "INSERT INTO customers (name, email, trial_ends_at) VALUES (?, ?, ?)",
            (name, email, trial_ends_at),
        )
    return row.lastrowid or 0


def order(customer_id: int, cents: int) -> int:
    """Buy something on account; returns the id of the invoice, due in four days."""
    due_at = time.time() + days(4).total_seconds()
    with database() as db:
        row = db.execute(
            "INSERT INTO invoices (customer_id, cents, due_at) VALUES (?, ?, ?)",
            (customer_id, cents, due_at),
        )
    return row.lastrowid or 0


def subscribe(customer_id: int) -> None:
    """Turn a trial into a paid account."""
    with database() as db:
        db.execute("UPDATE customers SET paid_at = ? WHERE id = ?", (time.time(), customer_id))


def settle(invoice_id: int) -> None:
    with database() as db:
        db.execute("UPDATE invoices SET paid_at = ? WHERE id = ?", (time.time(), invoice_id))


# What onboarding does.


def send_welcome(customer_id: int) -> None:
    _mail_customer(customer_id, "welcome")


def has_paid(customer_id: int) -> bool:
    with database() as db:
        paid_at = _customer(db, customer_id)["paid_at"]
        _note(db, f"customer {customer_id}", "paid?")
    return paid_at is not None


def trial_end(customer_id: int) -> datetime:
    with database() as db:
        return _aware(_customer(db, customer_id)["trial_ends_at"])


def send_last_call(customer_id: int) -> None:
    _mail_customer(customer_id, "last call")


# What collecting a payment does.


def reminder_dates(invoice_id: int) -> list[datetime]:
    """The day an invoice is due, two days later, and a week after that."""
    with database() as db:
        due = _aware(_invoice(db, invoice_id)["due_at"])
    return [due, due + days(2), due + days(9)]


def remind(invoice_id: int, number: int) -> bool:
    """Send a reminder unless the invoice has been paid; returns whether one was sent."""
    with database() as db:
        invoice = _invoice(db, invoice_id)
        if invoice["paid_at"] is not None:
            _note(db, f"invoice {invoice_id}", f"reminder #{number} not needed")
            return False
        _mail(db, _customer(db, invoice["customer_id"])["email"], f"reminder #{number}")
        _note(db, f"invoice {invoice_id}", f"reminder #{number}")
    return True


# What the export and the digest do.


def count_pages() -> int:
    with database() as db:
        customers: int = db.execute("SELECT count(*) FROM customers").fetchone()[0]
    return -(-customers // PAGE_SIZE)


def write_page(export_id: str, page: int, *, fencing_token: int) -> None:
    """Store one page; raises `StaleWriter` where a later owner has already written to it."""
    with database() as db:
        accepted = db.execute(
            "INSERT INTO exports (id, token) VALUES (:id, :token)"
            " ON CONFLICT (id) DO UPDATE SET token = :token WHERE token <= :token",
            {"id": export_id, "token": fencing_token},
        )
        if accepted.rowcount != 1:
            raise StaleWriter(f"page {page} of {export_id}: token {fencing_token} is too old")
        customers = db.execute(
            "SELECT name, email FROM customers ORDER BY id LIMIT ? OFFSET ?",
            (PAGE_SIZE, page * PAGE_SIZE),
        ).fetchall()
        content = "\n".join(f"{customer['name']},{customer['email']}" for customer in customers)
        db.execute("INSERT INTO pages VALUES (?, ?, ?)", (export_id, page, content))
        _note(db, f"export {export_id}", f"page {page}")


def send_digest() -> None:
    with database() as db:
        _mail(db, "owner@shop.example", "digest")
        _note(db, "shop", "digest")


def _mail_customer(customer_id: int, subject: str) -> None:
    with database() as db:
        _mail(db, _customer(db, customer_id)["email"], subject)
        _note(db, f"customer {customer_id}", subject)


def _mail(db: sqlite3.Connection, recipient: str, subject: str) -> None:
    db.execute(
        "INSERT INTO outbox (sent_at, recipient, subject) VALUES (?, ?, ?)",
        (time.time(), recipient, subject),
    )


def _note(db: sqlite3.Connection, subject: str, action: str) -> None:
    db.execute(
        "INSERT INTO activity (done_at, subject, action) VALUES (?, ?, ?)",
        (time.time(), subject, action),
    )


def _customer(db: sqlite3.Connection, customer_id: int) -> sqlite3.Row:
    return _one(db, "SELECT * FROM customers WHERE id = ?", customer_id)


def _invoice(db: sqlite3.Connection, invoice_id: int) -> sqlite3.Row:
    return _one(db, "SELECT * FROM invoices WHERE id = ?", invoice_id)


def _one(db: sqlite3.Connection, query: str, key: int) -> sqlite3.Row:
    row: sqlite3.Row | None = db.execute(query, (key,)).fetchone()
    if row is None:
        raise LookupError(f"no row {key} for: {query}")
    return row


def _aware(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=timezone.utc)
