"""From a request to a plan: one file or folder per transform."""
