"""Names of version 0.1.0 that pickled models and code of users may hold; `outgrow.__path__` leads here."""
