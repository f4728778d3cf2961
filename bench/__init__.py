"""Benches: each answers one question with a table, a plot and a line of JSON."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
