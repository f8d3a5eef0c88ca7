"""Sockets: addresses as text, listeners, keep-alive."""
