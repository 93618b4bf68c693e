"""The tasks. Durable ones read from top to bottom, over days."""

from __future__ import annotations

from celery_durable import DurableTask, current_lease, sleep, sleep_until, step
from example_project import shop
from example_project.celery import app
from example_project.days import days


@app.task(base=DurableTask)
def onboard(customer_id: int) -> str:
    """Accompany a trial: welcome, three days of silence, and a last call when it ends."""
    step(shop.send_welcome, customer_id)
    sleep(days(3), name="first days")
    if step(shop.has_paid, customer_id):
        return "customer"
    sleep_until(shop.trial_end(customer_id), name="trial end")
    step(shop.send_last_call, customer_id)
    return "lapsed"


@app.task(base=DurableTask, bind=True)
def collect_payment(self: DurableTask, invoice_id: int) -> str:
    """Remind of an invoice on each of its dates, until it is paid."""
    for number, date in enumerate(shop.reminder_dates(invoice_id), start=1):
        self.sleep_until(date)
        if not self.step(shop.remind, invoice_id, number):
            return f"paid after {number - 1} reminder(s)"
    return "handed to a collector"


@app.task(base=DurableTask, lease_ttl=30, max_crashes=5)
def export_customers() -> int:
    """Write all customers out, page by page; a crash costs the page that was being written.

    The store of the pages keeps the largest fencing token it has seen. So a worker that was frozen
    in the middle of a page, and comes back when another has taken over, cannot overwrite anything.
    """
    pages = step(shop.count_pages)
    for page in range(pages):
        lease = current_lease()
        lease.check()
        step(shop.write_page, lease.task_id, page, fencing_token=lease.token)
    return pages


@app.task
def send_digest() -> None:
    """Tell the owner of the shop how it goes. An ordinary task: it does not wait for anything."""
    shop.send_digest()
