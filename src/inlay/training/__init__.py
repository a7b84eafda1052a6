"""The Trainer glue."""
