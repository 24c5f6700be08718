if __name__ != "detcompile.passes":  # the links at the repository root are for readers, not for imports
    raise ImportError("import detcompile.passes, not passes: a module under two names would register its ops twice")
