if __name__ != "detcompile.runtime":  # the links at the repository root are for readers, not for imports
    raise ImportError("import detcompile.runtime, not runtime: two names would register its operations twice")
