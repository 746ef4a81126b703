"""Does the grown model compute what the old one did?"""
