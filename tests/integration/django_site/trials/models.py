"""What the tasks write through Django's own connection."""

from __future__ import annotations

from django.db import models


class Trial(models.Model):
    """A customer on trial."""

    name = models.CharField(max_length=100)

    def __str__(self) -> str:
        return self.name
