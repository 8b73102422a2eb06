"""The version of all of Signpost: programs, wheel, image and documents take it from here."""

VERSION = "0.2.0"
