"""Engine processes, the front end's links to them, and the protocol between both."""
