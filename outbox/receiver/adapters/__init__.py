"""The same receiver behind each kind of web server.  Nothing is decided here."""
