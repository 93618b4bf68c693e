"""The demo: kill everything while a task sleeps for three days, and watch it wake on time."""
