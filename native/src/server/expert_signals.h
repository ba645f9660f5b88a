// Upstream's shutdown takes locks. In a signal handler it would wait for ever for those that the interrupted thread
// holds, so a thread of its own calls it.
#pragma once

#include <functional>

// From now on the handler is called, on another thread, once for each signal that is posted, and exit() ends the process at
// once: upstream calls it for a second signal, on whatever thread that comes to, and destructors of a launcher's libraries
// would wait for this very thread.
void expert_signals_deliver_to(std::function<void(int)> handler);
// The server has ended: exit() is as usual again.
void expert_signals_end();
// For signal handlers.
void expert_signals_post(int number);

// Fails every computation that needs experts from now on, and ends the process with status 1 if what it still waits for does
// not come: a read of an expert, or the load of a model with a pack.
void expert_stop();
