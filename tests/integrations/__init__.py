"""What stands between partita and other libraries, beside those libraries themselves."""
