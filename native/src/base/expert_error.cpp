#include "expert_error.h"

#include <cstdarg>
#include <cstdio>

static thread_local char last_error[1024];

void expert_set_last_error(const char * format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof(last_error), format, args);
    va_end(args);
}

const char * expert_last_error(void) { return last_error; }
