"""A small Django project with durable tasks."""
