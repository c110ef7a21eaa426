"""Tests of partita.inspection."""
