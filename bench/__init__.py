"""One script per question; each prints a table and ends with one JSON line."""
