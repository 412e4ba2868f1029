"""The released files of Long Range Arena's six tasks, one task a file, in every layout in which they are passed on."""
