"""Tests of partita.table, without devices and process groups."""
