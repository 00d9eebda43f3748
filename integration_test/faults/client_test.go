package faults_test

// clientOf is set in the environment of a client process, to the database's URL.
const clientOf = "TXLIMIT_FAULTS_CLIENT_OF"

func client(url string) int { _ = url; return 1 }
