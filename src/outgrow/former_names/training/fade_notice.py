"""Former place of what these lines import."""

from outgrow.modules.fade_warnings import warn_if_written as warn_if_written
