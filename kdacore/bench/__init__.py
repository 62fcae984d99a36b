"""``kdacore bench``: cases as data, a correctness gate before every timing, rows that say what really ran."""
