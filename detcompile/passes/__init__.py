if __name__ != "detcompile.passes":  # the links at the repository root are for readers, not for imports
    raise ImportError("import detcompile.passes, not passes: two names would register its operations twice")
