// Why the last call of this thread failed: what expert_last_error() says.
#pragma once

#include "expert_provider.h"

void expert_set_last_error(const char * format, ...) __attribute__((format(printf, 1, 2)));
