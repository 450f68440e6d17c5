"""One rank's session with one worker: a file for each kind of worker."""
