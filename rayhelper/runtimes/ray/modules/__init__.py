"""Which of the user's modules must travel by value: a worker cannot import them, or not as the driver runs them.

sources    the source that a process runs of a module; which modules some worker lacks, or has otherwise
changes    what the driver has set in modules since it imported them
imports    which modules a class reaches by its imports, at the top of a file or in a function
pins       sources that travel: a worker that imports a module later gets the driver's source
reloads    refuses calls of an object whose modules were reloaded since it was constructed
"""
