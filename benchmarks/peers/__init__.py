"""The peers: other packages that wait and wake, each in a virtual environment of its own."""
