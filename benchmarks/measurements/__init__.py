"""The measurements: each is a function of the lab that yields rows of the table."""
