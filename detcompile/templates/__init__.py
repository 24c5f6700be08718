if __name__ != "detcompile.templates":  # the links at the repository root are for readers, not for imports
    raise ImportError("import detcompile.templates, not templates: two names would register its operations twice")
