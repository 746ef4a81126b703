"""Texts without the passwords of URLs, for whatever is printed or stored."""

from __future__ import annotations

import re

HIDDEN = "***"
IN_LOGIN = re.compile(r"(\w[\w+.-]*://[^\s:/@]*):(?!PASSWORD@)\S*@")  # PASSWORD: in examples
IN_QUERY = re.compile(r"([?&]\w*(?:password|passwd|pwd)=)[^&\s'\"]*", re.IGNORECASE)


def hide_passwords(text: str) -> str:
    """A text in which the passwords of URLs are replaced by stars.

    Example:
        >>> hide_passwords("can't open postgresql://me:secret@host/db?sslpassword=key&x=1")
        "can't open postgresql://me:***@host/db?sslpassword=***&x=1"
        >>> hide_passwords("can't open grpc://host:13000")
        "can't open grpc://host:13000"
    """
    return IN_QUERY.sub(rf"\1{HIDDEN}", IN_LOGIN.sub(rf"\1:{HIDDEN}@", text))
