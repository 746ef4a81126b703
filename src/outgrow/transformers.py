"""Growth in the Transformers Trainer."""

from outgrow.integrations.transformers import Grow as Grow
