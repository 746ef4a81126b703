"""Growth inside other libraries' training loops."""
