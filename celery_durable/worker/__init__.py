"""What runs inside a Celery worker."""
