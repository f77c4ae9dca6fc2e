"""Showing that what is promised holds."""

from ithaca.verify.certify import Certificate as Certificate
from ithaca.verify.certify import certify as certify
from ithaca.verify.exploration import Report as Report
from ithaca.verify.exploration import explore as explore
