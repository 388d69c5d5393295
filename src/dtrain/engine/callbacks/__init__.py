"""The callbacks of a `fit`: the user's, and the engine's reports."""
