"""The file of an exported model: its members, manifest and weights, and the machine properties that it needs."""
