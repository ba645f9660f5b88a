# Parts that are built if what they need is there. Each says in one line whether it is on, and what turns it on.
function(say_part text)
    if (NOT EXPERT_PACK_STOCK) # it is built like ours, which has said so
        message(STATUS "part: ${text}")
    endif()
endfunction()

# HTTPS in llama-server, also for -hf: with OpenSSL's headers
find_package(OpenSSL 3.0 QUIET)
set(LLAMA_OPENSSL ${OPENSSL_FOUND})
if (OPENSSL_FOUND)
    say_part("HTTPS (-hf, --ssl-key-file): on, OpenSSL ${OPENSSL_VERSION}")
else()
    say_part("HTTPS (-hf, --ssl-key-file): off, OpenSSL's headers were not found; install libssl-dev (apt) or openssl-devel (dnf) and build again")
endif()

# llama-server's web page: upstream's tools/ui, built with npm and embedded. Without it the server says so.
option(EXPERT_PACK_WEB_PAGE "Build llama-server's web page if Node and npm are there" ON)
set(node_least 20.19)          # what its build tools ask for
set(LLAMA_USE_PREBUILT_UI OFF) # would download a page of another version
set(LLAMA_BUILD_UI OFF)

find_program(NODE_EXECUTABLE node)
find_program(NPM_EXECUTABLE npm)
set(node_version "")
if (NODE_EXECUTABLE)
    execute_process(COMMAND ${NODE_EXECUTABLE} --version OUTPUT_VARIABLE node_version OUTPUT_STRIP_TRAILING_WHITESPACE)
    string(REPLACE "v" "" node_version "${node_version}")
endif()

if (EXPERT_PACK_STOCK)
    # comparisons need no page
elseif (NOT EXPERT_PACK_WEB_PAGE)
    say_part("web page: off, as EXPERT_PACK_WEB_PAGE says")
elseif (NOT NODE_EXECUTABLE OR NOT NPM_EXECUTABLE)
    say_part("web page: off, Node or npm was not found; install Node ${node_least} or later with npm and build again")
elseif (node_version VERSION_LESS node_least)
    say_part("web page: off, Node is ${node_version}; install ${node_least} or later and build again")
else()
    set(LLAMA_BUILD_UI ON)
    say_part("web page: on, built with Node ${node_version}")
endif()

set(GGML_CUDA ${EXPERT_PACK_CUDA})
if (EXPERT_PACK_CUDA AND NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES native) # of the GPUs that are here; upstream's list takes many times longer
endif()
if (EXPERT_PACK_CUDA)
    say_part("CUDA: on, for GPUs ${CMAKE_CUDA_ARCHITECTURES}")
else()
    say_part("CUDA: off; `make CUDA=1 build` turns it on (with pip: EXPERT_PACK_CUDA=ON, see README)")
endif()
