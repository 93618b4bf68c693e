"""A small Celery application with durable tasks: a shop that gives trials and sends bills."""
