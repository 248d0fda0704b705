"""What a terminal, a log or a report may be sent. Knows characters and the environment; knows no model and no file.

Text of a model or of a data set may hold control characters that move the cursor, change colours or retitle a window, and marks that
turn the direction of what follows; an error of a library may hold an access token. Neither goes out.
"""

import json
import os
import re
import unicodedata
from collections.abc import Mapping
from html import escape

SECRET_NAME = re.compile(
    r"PASSWORD|PASSWD|PASSPHRASE|(?:^|_)(?:[A-Z]*(?:TOKEN|SECRET|APIKEY|PRIVATEKEY|ACCESSKEY)|CREDENTIAL|CRED|KEY|PAT|AUTH)S?\d*"
    r"(?:$|_(?!PATH$|FILE$|DIR$|SOCK$))|._PWD$"
)
FORMS = (  # of access tokens and keys that are known by their first letters
    r"\bhf_[A-Za-z0-9]{30}[A-Za-z0-9]*|\bgh[pousr]_[A-Za-z0-9]{36}|\bgithub_pat_[A-Za-z0-9_]{50}[A-Za-z0-9_]*"
    r"|\bglpat-[A-Za-z0-9_-]{20}|\bsk-[A-Za-z0-9]{32}[A-Za-z0-9]*"
    r"|\bsk-(?:proj|ant)-[A-Za-z0-9_-]{32}[A-Za-z0-9_-]*|\bAKIA[A-Z0-9]{16}\b"
)
ACCESS_TOKEN = re.compile(FORMS + r"|(?<=://)(?:[^/\s:@]+:[^/\s@]+|[^/\s:@]{16}[^/\s:@]*)(?=@)")
SECRET_BYTES = re.compile((FORMS + r"|-----BEGIN [A-Z ]*PRIVATE KEY-----").encode())  # what no file that is sent may hold
HIDDEN = "[hidden]"


def visible(text: str, keep: str = "\n\t") -> str:
    """The text with control characters (C0, C1, direction marks, line separators, half surrogates) written out, as in \\x1b.
    keep: those that stay."""
    return "".join(_written(c) if c not in keep and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text)


def _written(character: str) -> str:
    # Joiners belong to words and emoji, and turn nothing.
    return character if character in "\u200c\u200d" else character.encode("unicode_escape", "surrogatepass").decode()


def secrets(environment: Mapping[str, str] | None = None) -> list[str]:
    """The values of the environment's secrets, by their names, in all forms in which a text may hold them: as they are, written out as in
    JSON and Python, on one line, and each line of several. The longest first, for one may be a part of another. Below eight characters
    there are none: those are words that a text may hold anyway."""
    named = (os.environ if environment is None else environment).items()
    found: set[str] = set()
    for value in (value for name, value in named if SECRET_NAME.search(name.upper())):
        found |= {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1], " ".join(value.split())}
        found |= set(value.splitlines())
    return sorted((form for form in found if len(form) >= 8), key=len, reverse=True)


def without_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text without the values of the environment's secrets (by their names), access tokens (by their form) and passwords in
    addresses."""
    for value in secrets(environment):
        text = text.replace(value, HIDDEN)
    return ACCESS_TOKEN.sub(HIDDEN, text)


def holds_secret(content: bytes, environment: Mapping[str, str] | None = None) -> bool:
    """Whether the bytes of a file hold a value of the environment's secrets, what has the form of an access token, or a private key."""
    return bool(SECRET_BYTES.search(content)) or any(value.encode("utf-8", "surrogateescape") in content for value in secrets(environment))


def markdown(text: str) -> str:
    """A name from outside as one line of Markdown that is neither HTML, nor a link or emphasis, nor a table's edge."""
    plain = escape(visible(" ".join(text.split())), quote=False).replace("|", "&#124;")
    return re.sub(r"([\\`*\[\]]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", plain)


def line(text: str) -> str:
    """What is said to a user: visible, without secrets."""
    return visible(without_secrets(text))
