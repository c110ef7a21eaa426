"""Tests of partita.plan: no devices, no process groups."""
