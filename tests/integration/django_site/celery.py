"""The Celery app, as Django's documentation and ours have it."""

from __future__ import annotations

import os

from celery import Celery

from celery_durable import Durable

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.integration.django_site.settings")

app = Celery("site")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
durable = Durable(app)
