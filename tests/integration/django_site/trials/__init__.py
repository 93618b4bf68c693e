"""An app of the project: Celery finds its tasks by itself."""
