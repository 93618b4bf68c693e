"""Django's settings: Celery's and the extension's among them, its tables beside the extension's own."""

from __future__ import annotations

import os

from sqlalchemy import make_url

_URL = make_url(os.environ["CELERY_DURABLE_DATABASE_URL"])

SECRET_KEY = "of a test"
USE_TZ = True
INSTALLED_APPS = ["tests.integration.django_site.trials"]
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": _URL.host,
        "PORT": _URL.port,
        "USER": _URL.username,
        "NAME": _URL.database,
        "ATOMIC_REQUESTS": True,
        "OPTIONS": {"application_name": "django"},
    }
}

CELERY_BROKER_URL = os.environ["CELERY_BROKER_URL"]
CELERY_RESULT_BACKEND = os.environ["CELERY_RESULT_BACKEND"]
CELERY_TASK_DEFAULT_QUEUE = "site"
CELERY_DURABLE_NAMESPACE = "of the site"
CELERY_DURABLE_POLL_INTERVAL = 0.1
CELERY_DURABLE_LEASE_TTL = 3
CELERY_DURABLE_HEARTBEAT_INTERVAL = 1
