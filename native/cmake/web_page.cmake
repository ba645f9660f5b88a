# llama-server's web page: upstream's tools/ui, built with npm and embedded. Without npm the server has none and says so.
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

if (NOT EXPERT_PACK_WEB_PAGE)
    message(STATUS "llama-server's web page: off, as EXPERT_PACK_WEB_PAGE says")
elseif (NOT NODE_EXECUTABLE OR NOT NPM_EXECUTABLE)
    message(STATUS "llama-server's web page: off, since node or npm was not found; install Node ${node_least} or later and build again")
elseif (node_version VERSION_LESS node_least)
    message(STATUS "llama-server's web page: off, since Node is ${node_version}; install ${node_least} or later and build again")
else()
    set(LLAMA_BUILD_UI ON)
    message(STATUS "llama-server's web page: built with Node ${node_version}")
endif()
