"""Tests of partita.table: no devices, no process groups."""
