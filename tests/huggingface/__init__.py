"""Tests of partita.huggingface."""
