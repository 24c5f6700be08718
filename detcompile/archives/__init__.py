"""The file of an exported model: members, manifest, stored weights, and what of a machine it depends on."""
