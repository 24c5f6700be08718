if __name__ != "detcompile.runtime":  # the links at the repository root are for readers, not for imports
    raise ImportError("import detcompile.runtime, not runtime: a module under two names would register its ops twice")
