if __name__ != "detcompile.templates":  # the links at the repository root are for readers, not for imports
    raise ImportError("import detcompile.templates, not templates: a module under two names would register its ops twice")
