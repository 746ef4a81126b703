"""What optimizers remember of a parameter, per optimizer class, and how it follows a growth."""
