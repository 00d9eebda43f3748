package main

var equivalents = []equivalent{}
