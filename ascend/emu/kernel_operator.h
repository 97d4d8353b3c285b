// The subset of Ascend C that the kernels use, executed on the host by the documented rules and checked against them.
//
// Written from the public documentation of CANN 8.5 for Atlas A2 (dav-2201). What is refused is listed in rules.h;
// a refusal names kernel, block, line and rule. What it cannot tell: how fast a kernel is, how the chip rounds Exp,
// Ln and Div, and whether the compiler accepts the source.
#pragma once

#include "copy.h"
#include "reduce.h"
